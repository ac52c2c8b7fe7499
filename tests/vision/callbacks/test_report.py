from __future__ import annotations

import base64
from html.parser import HTMLParser

from vision.callbacks import report

EVIL = "<script>alert('x')</script> & \"quoted\""


class Tags(HTMLParser):
    """Checks that tags are closed in order; keeps them and the text."""

    VOID = ("meta", "img", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_everything_is_escaped(tmp_path):
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    parts = [
        report.heading(EVIL, EVIL, EVIL),
        report.section(EVIL, report.facts([(EVIL, EVIL)]), report.table([EVIL], [[EVIL]]), report.text(EVIL)),
        report.section("x", report.code(EVIL), report.folded(EVIL, report.code(EVIL)), report.picture(tmp_path / "x.png", EVIL)),
    ]
    html = report.page(EVIL, parts)
    tags = Tags(html)
    assert "script" not in {tag for tag, _ in tags.seen}
    assert tags.text.count(EVIL) == 13
    assert next(attrs for tag, attrs in tags.seen if tag == "img")["alt"] == EVIL


def test_pictures_are_inlined(tmp_path):
    (tmp_path / "x.png").write_bytes(b"\x89PNG\x00\xff")
    source = Tags(report.picture(tmp_path / "x.png", "x")).seen[1][1]["src"]
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == b"\x89PNG\x00\xff"


def test_what_is_empty_is_left_out():
    assert report.section("Title", "", "") == ""
    assert report.facts([("a", ""), ("b", None)]) == ""
    assert "unknown" not in report.facts([("unknown", ""), ("known", 0)])
    assert "<td>0</td>" in report.facts([("unknown", ""), ("known", 0)])
