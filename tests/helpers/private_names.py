"""Which names of a framework a plugin touches, by its source: what it imports, wraps, reads and sets.

A plugin calls the framework's objects by names that are the same everywhere (``engine``, ``wrapper``, ...). Whatever is
read from those is a name of the framework, and so is every name with a leading underscore on anything but ``self``.
"""

import ast
import re
from pathlib import Path

#: Calls whose argument is a name: of ours and of Python.
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "option", "wrap_method", "_group")


def names_touched(folder, framework, objects, own=(), keys=False):
    """The names in the modules of a folder.

    Args:
        folder: of the plugin.
        framework: the package whose imports count.
        objects: variables that hold the framework's objects.
        own: names that are not the framework's: of torch, of Python and of this package.
        keys: also the keys that are read from or written to dicts, whosever these are.
    """
    found = set()
    for path in sorted(Path(folder).glob("**/*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith(framework):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                root = _root(node.value)
                hidden = node.attr.startswith("_") and not node.attr.startswith("__")
                if root in objects or (hidden and root not in ("self", "cls")):
                    found.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in _BY_NAME:
                found |= {
                    argument.value
                    for argument in node.args[1:2]
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                }
                found -= set(constants.values())  # marks of our own, which have names
            if keys:
                found |= _keys(node)
    return {name for name in found if re.fullmatch(r"\w+", name)} - set(own)


def _keys(node):
    """Of ``x["key"]`` and ``x.get("key")``."""
    words = []
    if isinstance(node, ast.Subscript):
        words = [node.slice]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("get", "pop", "setdefault"):
        words = node.args[:1]
    return {word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)}


def _root(node):
    """The variable, or ``self.x``, from which an expression is read."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self":
            return f"self.{node.attr}"
        node = next((getattr(node, part) for part in ("value", "func") if hasattr(node, part)), None)
        if node is None:
            return None
    return node.id


def names_in_table(page, heading):
    """The names in the first column of the table under a heading of a page -> the rest of the row."""
    section = Path(page).read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.M)
    return {name: rest for names, rest in rows for name in re.findall(r"`(\w+)`", names)}
