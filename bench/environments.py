"""An environment of its own for each engine: a venv or node_modules in a cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import leasetask
from bench.engine import Engine

NODE = "22"


class Unavailable(Exception):
    """An engine cannot be run here; the text says why."""


def interpreter(engine: Engine) -> list[str]:
    """Return the program that runs the engine's adapter, installing what it needs the first time.

    Raises:
        Unavailable: its runtime is missing, or its packages cannot be installed.
    """
    if not engine.packages:
        return [sys.executable]
    folder = _cache() / engine.name
    ready = folder / "ready"
    wanted = "\n".join((engine.runtime, *engine.packages))
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        install = _install_node if engine.runtime == "node" else _install_python
        install(engine, folder)
        ready.write_text(wanted)
    if engine.runtime == "node":
        node = folder / "node_modules" / ".bin" / "node"
        return ["env", f"BENCH_MODULES={folder}", str(node)]
    return [str(folder / "bin" / "python")]


def versions(engine: Engine) -> str:
    """Return the versions of an installed engine's packages."""
    if not engine.packages:
        return f"leasetask {leasetask.__version__}"
    folder = _cache() / engine.name
    names = [name.split("@")[0] for name in engine.packages]
    if engine.runtime == "node":
        shown = subprocess.run(
            ["npm", "ls", "--prefix", folder, *names], capture_output=True, text=True, check=False
        ).stdout.split()
        return ", ".join(word for word in shown if word.startswith(tuple(f"{n}@" for n in names)))
    code = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {names}))"
    python = folder / "bin" / "python"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "leasetask-bench"


def _install_python(engine: Engine, folder: Path) -> None:
    python = sys.executable if engine.runtime == "python" else _find_python(engine.runtime)
    if python is None:
        raise Unavailable(f"{engine.name} needs {engine.runtime}, which is not on this machine")
    _call(engine, [python, "-m", "venv", folder])
    _call(
        engine, [folder / "bin" / "pip", "install", "--quiet", "psycopg[binary]", *engine.packages]
    )


def _find_python(name: str) -> str | None:
    """Find an interpreter on the path; a pyenv shim may stand there for nothing, so try it."""
    number = name.removeprefix("python")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name), *sorted(pyenv.glob(f"{number}.*/bin/python"))]
    for candidate in candidates:
        if (
            candidate
            and subprocess.run([candidate, "-V"], capture_output=True, check=False).returncode == 0
        ):
            return str(candidate)
    return None


def _install_node(engine: Engine, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise Unavailable(f"{engine.name} needs npm, which is not on this machine")
    (folder / "package.json").write_text('{"private": true}')
    packages = [f"node@{NODE}", "pg", *engine.packages]
    _call(engine, ["npm", "install", "--no-fund", "--no-audit", "--prefix", folder, *packages])
    node = folder / "node_modules" / ".bin" / "node"
    if subprocess.run([node, "--version"], capture_output=True, check=False).returncode != 0:
        raise Unavailable(
            f"{engine.name} needs Node {NODE}, and the npm package `node` did not bring it"
        )


def _call(engine: Engine, command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Unavailable(f"{engine.name} could not be installed: {last[0][:200]}")
