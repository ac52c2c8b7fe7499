"""`vision models`: which names fit patterns, and which pattern was meant by one that fits none."""

from __future__ import annotations

import pytest

from vision.cli import main


def test_models_are_filtered_by_several_patterns(capsys):
    assert main(["models", "dat_t*", "vit_t*"]) == 0
    assert capsys.readouterr().out.split() == ["dat_tiny", "vit_tiny_patch16_224"]
    assert main(["models", "--pretrained", "dat*", "vit_t*"]) == 0
    assert capsys.readouterr().out.split() == ["vit_tiny_patch16_224"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["swin"], "no model fits 'swin'; did you mean 'swin*'?"),
        (["dat*", "VIT*"], "no model fits 'VIT*'; did you mean 'vit_*'?"),
        (["swin_tiny"], "no model fits 'swin_tiny'; did you mean swin_tiny_patch4_window7_224?"),
        (["dat*", "--pretrained"], "timm publishes no weights of dat*; leave out --pretrained"),
    ],
)
def test_a_pattern_of_models_that_fits_none_gets_one_that_does(args, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["models", *args])
    assert capsys.readouterr() == ("", f"error: {text}\n")
