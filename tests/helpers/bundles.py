"""Stores that bundles come from."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.archives import CAP, Prompt

from keepwarm.store import Archive


def store(folder: Path, key: bytes | None = None) -> Archive:
    return Archive.open(folder, max_ram=0, max_disk=CAP, key=key)


def made(folder: Path, file: Path, key: bytes | None = None) -> Prompt:
    """Export a prompt that is stored in three runs, and whose last run goes on with somebody's question."""
    one = Prompt()
    with store(folder, key) as archive:
        for first, last in ((0, 3), (3, 5), (5, 8)):
            one.put(archive, first, last)
            archive.flush()
        archive.contents.name("support bot", one.ids[6])
        archive.contents.name("the same", one.ids[6])
        report = archive.contents.export("support bot", file)
    assert (report.names, report.tokens, report.blocks) == (("support bot", "the same"), 56, 7)
    assert report.nbytes == file.stat().st_size
    return one
