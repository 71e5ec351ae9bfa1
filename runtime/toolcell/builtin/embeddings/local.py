"""`LocalEmbeddings`: a static model of model2vec, from a directory. Nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from toolcell.errors import UsageError
from toolcell.support import daemon_threads
from toolcell.support.checks import check_kind
from toolcell.support.lazy import needed

FILES: Final = ("config.json", "model.safetensors", "tokenizer.json")
"""Files of a model. Source: `StaticModel.save_pretrained` of model2vec."""


class LocalEmbeddings:
    """Vectors of a model on this machine.

    toolcell fetches no models: `pip install 'toolcell[builtin]'`, and fetch a model once with
    `StaticModel.from_pretrained(NAME).save_pretrained(DIRECTORY)`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_kind("LocalEmbeddings(path)", path, str, os.PathLike)
        self._path = Path(path)
        missing = [name for name in FILES if not (self._path / name).is_file()]
        if missing:
            raise UsageError(
                f"there is no model of model2vec in {self._path}: {', '.join(missing)} missing; save one there with "
                "StaticModel.from_pretrained(NAME).save_pretrained(DIRECTORY)"
            )
        self._model: Any = needed("model2vec", "LocalEmbeddings").StaticModel.from_pretrained(str(self._path))

    def dimensions(self) -> int:
        return int(self._model.dim)

    def name(self) -> str:
        return f"model2vec-{self._path.resolve().name}"

    async def embed(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text, made on a worker thread."""
        return await daemon_threads.run_sync(lambda: self._model.encode(texts).tolist())
