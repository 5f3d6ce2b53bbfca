"""Search as a tool: BM25 over a corpus in a local file."""

from __future__ import annotations

import gzip
import os
import threading
from functools import cache
from pathlib import Path

from rlcli.environments.tools import ToolEnvironment
from rlcli.errors import DataError
from rlcli.support.reading import bounded_lines, check_regular, opened, parse_json
from rlcli_environments.bm25 import Bm25

MOST_PASSAGES = 10
_loading = threading.Lock()


class Search(ToolEnvironment):
    """Search a local corpus: a tool that returns the best passages (BM25).

    The messages are the row's own; its verifier scores the policy's last turn.
    corpus: a file of passages, JSON Lines (.jsonl, .jsonl.gz) or parquet, with `id` and `text`; each process indexes it
    once. count: passages a call, unless the policy asks for another number, up to 10. passage_chars: of a passage; what
    is beyond is cut.
    """

    def __init__(self, corpus: str, count: int = 3, passage_chars: int = 1000) -> None:
        super().__init__([self.search])
        self.count, self.passage_chars = count, passage_chars
        with _loading:  # many conversations begin at once
            self.passages, self.index = _indexed(os.path.abspath(corpus))

    def search(self, query: str, count: int | None = None) -> str:
        """Searches a collection of passages and returns those that match best.

        Args:
            query: words to look for
            count: how many passages
        """
        documents = self.index.best(query, max(1, min(self.count if count is None else int(count), MOST_PASSAGES)))
        if not documents:
            return "No passage has any of these words."
        return "\n\n".join(
            f"[{name}] {text[: self.passage_chars]}" for name, text in map(self.passages.__getitem__, documents)
        )


@cache
def _indexed(path: str) -> tuple[list[tuple[str, str]], Bm25]:
    passages = read_corpus(Path(path))
    return passages, Bm25([text for _, text in passages])


def read_corpus(path: Path) -> list[tuple[str, str]]:
    """Id and text of each passage. Raises `DataError`, with the line."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            check_regular(path, links=True)
            rows = parquet.read_table(path, columns=["id", "text"]).to_pylist()
        else:
            with opened(path, links=True) as file, gzip.open(file) if path.suffix == ".gz" else file as content:
                rows = [parse_json(line) for line in bounded_lines(content, path) if line.strip()]
    except (OSError, ValueError, KeyError) as error:  # pyarrow's are of these kinds
        raise DataError(
            f"the corpus {path} cannot be read: {error}", "give JSON Lines or parquet with id and text"
        ) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or row.get("id") is None:
            raise DataError(
                f"the corpus {path}: passage {number} has no id and text: {str(row)[:80]}", "fix that passage"
            )
    if not rows:
        raise DataError(f"the corpus {path} has no passages", "give a file of passages")
    return [(str(row["id"]), row["text"]) for row in rows]
