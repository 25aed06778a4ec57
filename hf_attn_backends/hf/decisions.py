"""Which decision belongs to which model; kept beside the objects, never in a configuration.

An attribute of a configuration would be written to `config.json` and come back stale, so the
decision lies in a cell that two places point to: a weak table by configuration (the outer model
and the model inside it share one configuration object, so both see a later change), and the
model's own `__dict__` (a deep copy has a configuration of its own, and takes the cell along). A
pickled model leaves the cell behind: it loads where this package is not installed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_attn_backends.selection import Decision

_ATTRIBUTE = "_hf_attn_decision"


class _Cell:
    """A decision that may still change; copied with its model, never pickled."""

    __slots__ = ("decision",)

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def __deepcopy__(self, memo: dict[int, Any]) -> _Cell:
        return _Cell(self.decision)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


_by_config: dict[int, tuple[weakref.ref, _Cell]] = {}


def remember(owner: Any, decision: Decision) -> None:
    """Keep a decision for a model or for a configuration.

    Args:
        owner: A model (its configuration is keyed too), or a configuration alone.
        decision: What the selector answered.
    """
    config = getattr(owner, "config", None)
    is_model = config is not None
    cell = _cell_of_config(config if is_model else owner)
    if cell is None and is_model:
        cell = vars(owner).get(_ATTRIBUTE)
    if cell is None:
        cell = _Cell(decision)
    cell.decision = decision
    _key_config(config if is_model else owner, cell)
    if is_model:
        vars(owner)[_ATTRIBUTE] = cell


def decision_of(owner: Any) -> Decision | None:
    """The decision for a model, a wrapped model or a configuration; None where none was made.

    Args:
        owner: A model; one inside a PEFT, DDP or compile wrapper; a composite, whose first
            sub-model with a decision answers; or a configuration.
    """
    cell = _find(owner)
    if cell is None and callable(getattr(owner, "modules", None)):
        for module in owner.modules():
            cell = _find(module)
            if cell is not None:
                break
    return None if cell is None else cell.decision


def decisions_of(model: Any) -> dict[str, Decision]:
    """Every decision in a model, by the dotted name of the sub-model that it was made for."""
    found: dict[str, Decision] = {}
    cells: set[int] = set()
    for name, module in model.named_modules():
        cell = _find(module)
        if cell is not None and id(cell) not in cells:
            cells.add(id(cell))
            found[name] = cell.decision
    return found


def _find(owner: Any) -> _Cell | None:
    """The cell of a model or of a configuration, without looking inside."""
    cell = getattr(owner, "__dict__", {}).get(_ATTRIBUTE)
    if cell is not None:
        return cell
    if hasattr(owner, "_attn_implementation_internal"):
        return _cell_of_config(owner)
    if hasattr(owner, "get_correct_attn_implementation"):
        return _cell_of_config(getattr(owner, "config", None))
    return None


def _cell_of_config(config: Any) -> _Cell | None:
    entry = _by_config.get(id(config))
    return entry[1] if entry is not None and entry[0]() is config else None


def _key_config(config: Any, cell: _Cell) -> None:
    if _cell_of_config(config) is cell:
        return
    key = id(config)

    def forget(dead: weakref.ref) -> None:
        entry = _by_config.get(key)
        if entry is not None and entry[0] is dead:
            del _by_config[key]

    _by_config[key] = (weakref.ref(config, forget), cell)


def snapshot(model: Any) -> list[tuple[Any, Decision | None]]:
    """The decisions in a model as they are now, for `restore`."""
    cells = (_find(module) for module in model.modules())
    return [(cell, cell.decision) for cell in cells if cell is not None]


def restore(kept: list[tuple[Any, Decision | None]]) -> None:
    """Put decisions back to what a `snapshot` saw."""
    for cell, decision in kept:
        cell.decision = decision
