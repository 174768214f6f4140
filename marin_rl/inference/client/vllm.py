"""vLLM's route from ids to ids, `/inference/v1/generate`, and the spans of weights in its answers.

vLLM serves it where it is started with `--enable-scale-out`, and `marin-rl serve` always. Each
choice names the weights of its tokens in `weight_versions`, spans `[start, end)` with the label
that the weights had: the one that `inference.publish: vllm_reload` gave them (round and digest, as
in `00012-1a2b3c4d`), a number at servers of our own, or any other text. The answer has no text and
need not name its model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from marin_rl.errors import BadResponse, EndpointUnavailable, StalePolicy
from marin_rl.inference.client.answers import (
    ChatAnswer,
    WeightSpan,
    decode_completion,
    read_choices,
    read_object,
)
from marin_rl.inference.client.dialects import Ids, Probe, TokenIdsDialect
from marin_rl.inference.client.http_client import Root
from marin_rl.inference.client.protocol import (
    GENERATE_ROUTE,
    ChatRequest,
    ServedModel,
    parse_label,
    sampling_fields,
)
from marin_rl.inference.stops import first_stop


class VllmDialect(TokenIdsDialect):
    """`/inference/v1/generate`, one sample a request; the template decodes the ids of an answer."""

    route = Root(GENERATE_ROUTE)

    def body(self, request: ChatRequest, prompt_ids: Ids) -> dict[str, Any]:
        """As the base; `logprobs: 0` asks for the sampled tokens' own."""
        parameters = sampling_fields(request.sampling, request.stop_token_ids)
        return {
            "model": request.model,
            "token_ids": prompt_ids.tolist(),
            "sampling_params": parameters | {"logprobs": 0},
        }

    def read(self, data: bytes, request: ChatRequest, prompt_ids: Ids) -> ChatAnswer:
        body, choices = read_choices(data)
        if len(choices) != 1:
            raise BadResponse(f"expected one choice, found {len(choices)}")
        completion = decode_completion(choices[0], "")
        ids = completion.token_ids.tolist()
        _check_named(choices[0], ids)
        text = self._template.text(ids)
        completion = replace(
            completion,
            text=text[: first_stop(text, request.sampling.stop)],
            weights=spans_of(choices[0], len(ids)),
        )
        return ChatAnswer(
            model=str(body.get("model") or request.model),
            prompt_token_ids=prompt_ids,
            completions=(completion,),
            request_id=str(body.get("request_id") or ""),
        )

    async def serving(self, name: str, probe: Probe) -> ServedModel:
        """The version in the label of the weights; EndpointUnavailable while there are none."""
        # One whose reload failed stays paused, with the label of the weights before.
        if _field(await probe(Root("/is_paused")), "is_paused") is True:
            raise EndpointUnavailable("is paused: new weights are being loaded, or could not be")
        return labelled(str(_field(await probe(Root("/weight_info")), "weight_version")))


def labelled(label: str) -> ServedModel:
    """The checkpoint that a label names. Raises StalePolicy for a label of another make."""
    model = parse_label(label)
    if model is None or not model.digest:
        raise StalePolicy(
            f"names its weights {label!r}, which are none of this run's: it was restarted, and "
            "gets weights with the next checkpoint"
        )
    return model


def _field(data: bytes, name: str) -> object:
    body = read_object(data)
    if name not in body:
        raise BadResponse(f"expected an object with {name}, found {data[:80]!r}")
    return body[name]


def _check_named(choice: Mapping[str, Any], ids: list[int]) -> None:
    """Raise BadResponse where log-probabilities are of other tokens than the choice has."""
    named = [item.get("token_id") for item in (choice.get("logprobs") or {}).get("content") or ()]
    if named and named != ids:
        raise BadResponse(
            f"expected logprobs of the tokens {', '.join(map(str, ids)):.80}, found those of "
            f"{', '.join(map(str, named)):.80}"
        )


def spans_of(choice: Mapping[str, Any], tokens: int) -> tuple[WeightSpan, ...]:
    """The spans of a choice, in order. Raises BadResponse unless they cover its tokens exactly."""
    values = choice.get("weight_versions")
    if not isinstance(values, list):
        raise BadResponse(
            "the endpoint gave no weight_versions, spans of tokens and their weights: expected "
            f"vLLM 0.32 or newer, or marin-rl's own server; found {values!r:.80}"
        )
    spans, end = list[WeightSpan](), 0
    for value in values:
        try:
            label, first, last = value["version"], value["start"], value["end"]
        except (TypeError, KeyError):
            raise BadResponse(
                f"expected weight_versions[] with version, start and end, found {value!r:.80}"
            ) from None
        # `type` and not `isinstance`: a boolean is an int to Python.
        whole = type(label) is str and type(first) is int and type(last) is int
        if not whole or first != end or last <= first:
            raise BadResponse(
                f"expected weight_versions[] of a text and a span of tokens that begins at {end}, "
                f"found {value!r:.80}"
            )
        spans.append(WeightSpan(label, first, last))
        end = last
    if end != tokens:
        raise BadResponse(f"expected weight_versions of all {tokens} tokens, found {end} in them")
    return tuple(spans)
