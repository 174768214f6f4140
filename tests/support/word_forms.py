"""A task like the demo's: a word is written bare or quoted, and only bare words are rewarded."""

import json
import random
from pathlib import Path

from marin_rl.types import Example


def bare(example: Example, completion: str) -> float:
    """1 for any text without quotation marks."""
    return float(bool(completion) and '"' not in completion)


def write_prompts(path: Path, count: int = 600) -> Path:
    """Prompts with random words; of the answers shown to a warm start, two in three are quoted."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(count)]
    answers = [word if number % 3 == 0 else f'"{word}"' for number, word in enumerate(words)]
    rows = [
        {"id": str(number), "prompt": f"say {word}", "answer": answer}
        for number, (word, answer) in enumerate(zip(words, answers, strict=True))
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
