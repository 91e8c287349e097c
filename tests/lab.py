"""A place to try poisoned files: a model folder, a corpus, a canary, and the command line.

Every payload, were it loaded, would make the canary file. Commands run in this process, as the
entry point does.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import small_run

from dualsft import cli
from dualsft.model import safety as model_safety


class Touch:
    """Unpickling it runs a shell command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch '{self.canary}'",)


class Lab:
    """A model folder to poison, a corpus, a canary, and the command line."""

    def __init__(self, root: Path, model: Path, corpus: Path, capsys: Any) -> None:
        self.root, self.corpus, self.capsys = root, corpus, capsys
        self.model = root / "model"
        shutil.copytree(model, self.model)
        self.canary = root / "canary"
        self.outside = root / "outside"
        self.outside.mkdir()

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(Touch(self.canary))

    @property
    def code(self) -> str:
        return f"import os\nos.system(\"touch '{self.canary}'\")\n"

    def configure(self, name: str, place: str = "", **values: Any) -> None:
        """Add keys to a configuration file, or to an object inside it."""
        path = self.model / name
        content = json.loads(path.read_text()) if path.exists() else {}
        target = content.setdefault(place, {}) if place else content
        target.update(values)
        path.write_text(json.dumps(content))

    def without_weights(self) -> None:
        (self.model / "model.safetensors").unlink()

    def index(self, name: str) -> None:
        self.without_weights()
        text = json.dumps({"weight_map": {"model.norm.weight": name}})
        (self.model / model_safety.INDEX).write_text(text)

    def dualsft(self, *words: str) -> tuple[int, str]:
        """(exit code, what was said on stderr)."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["dualsft", *words])
            with pytest.raises(SystemExit) as ended:
                cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        said = self.capsys.readouterr().err
        assert "Traceback" not in said, said
        return code, said

    def run(self, *more: str) -> tuple[int, str]:
        words = [*small_run(self.model, self.corpus), *more]
        return self.dualsft("run", "--out", str(self.root / "run"), "--until", "split", *words)

    def assert_unharmed(self) -> None:
        assert not self.canary.exists(), "the payload ran"
