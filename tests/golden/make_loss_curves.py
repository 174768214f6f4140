"""Write loss-curves.json again, from the present code.

    PYTHONPATH=.:tests .venv/bin/python tests/golden/make_loss_curves.py

A refactor must not need this. A change that means to train other numbers does, and its commit says
why. tests/training/test_loss_curves.py compares the code with the file.
"""

import json

import jax
from training.batches import FILE, OBJECTIVES, played


def main() -> None:
    """Play every curve and keep it, with the version of JAX that it was played on."""
    document = {"jax": jax.__version__, "curves": {name: played(name) for name in OBJECTIVES}}
    FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
