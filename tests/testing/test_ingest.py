"""The ingest example, with the test that its user would write."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tables import database

from leasetask import TaskView
from leasetask.testing import DoesNotSurvive, crash_anywhere

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import ingest

CONTENT = b"a small picture" * 100


@dataclass
class Archive:
    """The folder to copy to, and the table that says what is in it."""

    folder: Path
    dsn: str

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    @property
    def rows(self) -> list[tuple[str, str]]:
        return database(self.dsn).execute("select target, sha256 from ingested").fetchall()


@pytest.fixture
def media(tmp_path: Path) -> ingest.Media:
    source = tmp_path / "camera" / "a.jpg"
    source.parent.mkdir()
    source.write_bytes(CONTENT)
    return ingest.Media(str(source), str(tmp_path / "archive" / "a.jpg"))


def emptied(media: ingest.Media, dsn: str) -> Archive:
    folder = Path(media.target).parent
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    database(dsn).execute(ingest.TABLE)
    database(dsn).execute("delete from ingested")
    return Archive(folder, dsn)


def ingested_once(archive: Archive, outcome: TaskView) -> None:
    """The copy is whole, is there once, and the row is there if and only if the copy is."""
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    if outcome.status == "succeeded":
        assert archive.files == ["a.jpg"]
        assert (archive.folder / "a.jpg").read_bytes() == CONTENT
        assert [sha256 for _, sha256 in archive.rows] == [hashlib.sha256(CONTENT).hexdigest()]
    else:
        assert archive.files == []


def test_a_file_is_ingested_once_whatever_happens(leasetask_db: str, media: ingest.Media) -> None:
    survived = crash_anywhere(
        ingest.app,
        ingest.ingest,
        media,
        world=lambda dsn: emptied(media, dsn),
        check=ingested_once,
        dsn=leasetask_db,
    )
    # Two steps, an effect, a transaction, the end.
    assert survived.points == 2 * 4 + 6 + 3 + 2


def test_the_test_would_find_a_copy_that_nobody_deletes(
    leasetask_db: str, media: ingest.Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "delete", lambda target: None)
    with pytest.raises(DoesNotSurvive, match="see what the compensations 'copy' undo"):
        crash_anywhere(
            ingest.app,
            ingest.ingest,
            media,
            world=lambda dsn: emptied(media, dsn),
            check=ingested_once,
            faults=["cancel"],
            dsn=leasetask_db,
        )
