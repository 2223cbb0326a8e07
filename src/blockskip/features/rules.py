"""The rule for skipped spans that a config names: the package's own, or a class in a user's file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from blockskip.errors import UserError
from blockskip.keys import file_sha256
from blockskip.method.skipping import ConstantResidual, NoResidual, SkipRule

RULES: dict[str, type[SkipRule]] = {"residual": ConstantResidual, "none": NoResidual}


def load_rule(name: str) -> tuple[SkipRule, str]:
    """The rule, and its identity for keys.

    Args:
        name: ``residual``, ``none``, or ``file.py:Class`` with a subclass of ``SkipRule``.

    Raises:
        UserError: there is no such rule.
    """
    if name in RULES:
        return RULES[name](), name
    file, _, class_name = name.rpartition(":")
    path = Path(file).expanduser()
    if not file.endswith(".py") or not path.is_file():
        raise UserError(f'skip.rule = "{name}" is neither "residual", "none", nor an existing "file.py:Class".')
    spec = importlib.util.spec_from_file_location(f"blockskip_rule_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
        rule = getattr(module, class_name)()
    except (Exception, SystemExit) as error:  # whatever a user's file raises is named, not traced
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f'skip.rule = "{name}" cannot be loaded: {reason}.') from error
    if not isinstance(rule, SkipRule):
        raise UserError(f'skip.rule = "{name}": {class_name} is no subclass of blockskip.method.skipping.SkipRule.')
    return rule, f"{class_name}:{file_sha256(path)}"
