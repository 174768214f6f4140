"""vLLM's route from ids to ids, `/inference/v1/generate`: its bodies, and the spans of weights.

Each choice names the weights of its tokens in `weight_versions`, spans `[start, end)` with the
label that the weights had: the one that `inference.publish: vllm_reload` gave them (round and
digest, as in `00012-1a2b3c4d`), a number at servers of our own, or any other text. The answer has
no text and need not name its model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.errors import BadResponse
from marin_rl.inference.client.answers import ChatAnswer, decode_completion, read_choices
from marin_rl.inference.client.protocol import (
    ServedModel,
    parse_served_model_id,
    sampling_fields,
    served_model_id,
)
from marin_rl.types import Sampling

Text = Callable[[list[int]], str]


def label_of(version: int, digest: str) -> str:
    """The label of weights at vLLM: round and digest, as in a served model's id."""
    return served_model_id("", version, digest).removeprefix("@")


def parse_label(label: str) -> ServedModel | None:
    """Version and digest in a label; without a digest in one of our own servers' numbers.

    None for a label of another make, such as the one that vLLM begins with.
    """
    if label.isdecimal() and label.isascii():
        return ServedModel(name="_", weight_version=int(label), digest="")
    model = parse_served_model_id(f"_@{label}")
    # Another name where the label has an `@` of its own.
    return model if model is not None and model.name == "_" else None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` of a completion, and the label of the weights that sampled them."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generated:
    """Answer with one completion, and the spans of its weights, which cover all its tokens."""

    answer: ChatAnswer
    spans: tuple[Span, ...]

    @property
    def labels(self) -> list[str]:
        """Labels of the weights that sampled tokens, in their order."""
        return list(dict.fromkeys(span.label for span in self.spans))


def generate_body(
    model: str,
    prompt_ids: Int32[np.ndarray, " P"],
    sampling: Sampling,
    stop_token_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """The JSON body for one sample of a prompt; `logprobs: 0` asks for the sampled tokens' own."""
    return {
        "model": model,
        "token_ids": prompt_ids.tolist(),
        "sampling_params": sampling_fields(sampling, stop_token_ids) | {"logprobs": 0},
    }


def decode_generated(
    data: bytes, model: str, prompt_ids: Int32[np.ndarray, " P"], text_of: Text
) -> Generated:
    """Read the answer to one sample; `text_of` decodes ids. Raises BadResponse."""
    body, choices = read_choices(data)
    if len(choices) != 1:
        raise BadResponse(f"expected one choice, found {len(choices)}")
    completion = decode_completion(choices[0], "")
    ids = completion.token_ids.tolist()
    _check_named(choices[0], ids)
    spans = spans_of(choices[0], len(ids))
    completion = replace(completion, text=text_of(ids))
    answer = ChatAnswer(
        model=str(body.get("model") or model),
        prompt_token_ids=prompt_ids,
        completions=(completion,),
        request_id=str(body.get("request_id") or ""),
    )
    return Generated(answer, spans)


def _check_named(choice: Mapping[str, Any], ids: list[int]) -> None:
    """Raise BadResponse where log-probabilities are of other tokens than the choice has."""
    named = [item.get("token_id") for item in (choice.get("logprobs") or {}).get("content") or ()]
    if named and named != ids:
        raise BadResponse(
            f"expected logprobs of the tokens {', '.join(map(str, ids)):.80}, found those of "
            f"{', '.join(map(str, named)):.80}"
        )


def spans_of(choice: Mapping[str, Any], tokens: int) -> tuple[Span, ...]:
    """The spans of a choice, in order. Raises BadResponse unless they cover its tokens exactly."""
    values = choice.get("weight_versions")
    if not isinstance(values, list):
        raise BadResponse(
            "the endpoint gave no weight_versions, spans of tokens and their weights: expected "
            f"vLLM 0.32 or newer, or marin-rl's own server; found {values!r:.80}"
        )
    spans, end = list[Span](), 0
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
        spans.append(Span(label, first, last))
        end = last
    if end != tokens:
        raise BadResponse(f"expected weight_versions of all {tokens} tokens, found {end} in them")
    return tuple(spans)
