"""The package: metadata, bounds of its requirements, citation, hooks."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

TOP = Path(__file__).parent.parent
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}
# Private parts are used, or what is public moves from version to version.
BOUNDED = {
    "fastapi", "jax", "llguidance", "marin-haliax", "marin-levanter", "optax", "orbax-checkpoint",
    "prefect", "starlette", "tokenizers", "transformers", "uvicorn", "websockets",
}  # fmt: skip


def test_requirements_that_move_have_an_upper_bound():
    for name in BOUNDED:
        operators = {each.operator for each in REQUIREMENTS[name].specifier}
        assert operators & {"<", "=="}, name


def test_every_requirement_has_a_lower_bound_and_is_pinned_for_tests():
    lines = (TOP / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {each.name: each for each in map(Requirement, filter(is_pin, lines))}
    for name, requirement in REQUIREMENTS.items():
        assert {each.operator for each in requirement.specifier} & {">=", "=="}, name
        (pin,) = pins[name].specifier
        assert requirement.specifier.contains(pin.version, prereleases=True), name


def is_pin(line: str) -> bool:
    """Return True for a line that pins a package, of any machine."""
    return "==" in line and not line.lstrip().startswith("#")
