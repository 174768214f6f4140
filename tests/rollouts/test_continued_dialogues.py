"""Episodes whose turns continue from the KV cache, with programs as users have them."""

import pytest
from support.dialogues import DIGEST, SAMPLING, EchoTwice, play_dialogues
from support.servers import ENGINE, serving

from marin_rl.config import EnvironmentConfig
from marin_rl.inference.generation import GenerationRequest
from marin_rl.rollouts.trajectories import GroupRequest


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.bits
def test_a_second_turn_continues_from_the_cache_of_the_first_with_the_same_bits() -> None:
    environment = EchoTwice(EnvironmentConfig(name="echo"))
    example = environment.example(0, 0, "train")
    request = GroupRequest(group_id="g", example=example, size=4, sampling=SAMPLING)
    keeping = ENGINE.model_copy(update={"prefix_cache": True})
    with serving(parameters_digest=DIGEST, engine=keeping) as server:
        engine = server.engine
        if not engine.plan.keeps_prefixes:
            pytest.skip("on this machine prefill and decode have other bits: nothing is kept")
        dialogues = [
            t.turns for t in play_dialogues(server, request, environment) if len(t.turns) == 2
        ]
        assert len(dialogues) >= 2, "these seeds end their first turns at a stop string"
        stats = engine.stats.snapshot()
        assert stats.continued_prompts == len(dialogues)
        firsts = [len(first.answer.prompt_token_ids) for first, _ in dialogues]
        assert stats.cached_tokens >= sum(firsts)
        for _, second in dialogues:
            engine.reset_prefix_cache()
            ids = second.answer.prompt_token_ids
            fresh = engine.submit(GenerationRequest(prompt_ids=ids, sampling=second.sampling))
            result = fresh.result(timeout=120)
            assert result.cached_tokens == 0
            assert result.samples[0].token_ids.tolist() == second.completion.token_ids.tolist()
            assert result.samples[0].logprobs.tobytes() == second.completion.logprobs.tobytes()
        assert "marin_rl_prefix_cache 1.0" in server.telemetry.exposition().decode()
