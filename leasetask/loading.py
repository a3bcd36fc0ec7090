"""Imports the App that a command names: `module:app`, or `path/to/file.py:app`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

from leasetask.app import App
from leasetask.errors import ConfigurationError


def load_app(spec: str) -> App:
    """Import an App.

    Args:
        spec: `package.module:attribute` or `path/to/file.py:attribute`; `app` by default.

    Raises:
        ConfigurationError: the module, the attribute or the App is not there.
    """
    module_name, _, attribute = spec.rpartition(":")
    if not module_name or "/" in attribute or attribute.endswith(".py"):
        module_name, attribute = spec, "app"
    if not module_name or module_name.startswith((".", ":")):
        raise ConfigurationError(f"{spec!r} names no App; write MODULE:APP, such as shop.tasks:app")
    try:
        is_file = module_name.endswith(".py")
        module = _load_file(module_name) if is_file else _load_module(module_name)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{spec} cannot be imported: {_in_one_line(error)}") from error
    value = getattr(module, attribute, None)
    if not isinstance(value, App):
        raise ConfigurationError(f"{spec}: {attribute!r} in {module_name} is not a leasetask App")
    return value


def _load_module(name: str) -> object:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.split(".", maxsplit=1)[0] == error.name.split(".")[0]:
            raise ConfigurationError(f"no module {name!r} here or on the Python path") from error
        raise


def _load_file(path: str) -> object:
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigurationError(f"no file {path}")
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _in_one_line(error: BaseException) -> str:
    """Say what a module raised while it was imported, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {what} ({frame.filename}, line {frame.lineno})"
