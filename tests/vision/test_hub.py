"""What is wrong with a timm model of a config, in one line."""

from __future__ import annotations

import pytest
import timm

from vision import hub
from vision.errors import UserError


def error_of(**options):
    with pytest.raises((TypeError, AssertionError)) as caught:
        timm.create_model(**options)
    assert hub.by_timm(caught.value)
    return hub.refusal(options, caught.value)


def test_what_timm_refuses_is_told_with_the_options_that_were_given():
    assert error_of(model_name="resnet18", drop_pth_rate=0.1).endswith("no option drop_pth_rate; did you mean drop_path_rate?")
    assert error_of(model_name="resnet18.a1_in1k", zzz=1) == "timm's resnet18.a1_in1k has no option zzz; see timm's ResNet"
    told = error_of(model_name="vit_tiny_patch16_224", depth=1, global_pool="maxx")
    assert told.startswith("timm's vit_tiny_patch16_224 does not take depth=1, global_pool='maxx': ")


def test_every_timm_model_of_a_config_is_found():
    one = {"class_path": "timm.create_model", "init_args": {"model_name": "resnet18"}, "dict_kwargs": {"in_chans": 1}}
    assert list(hub.timm_models({"model": {"init_args": {"model": one, "parts": [one, 3]}}, "data": None})) == [
        {"model_name": "resnet18", "in_chans": 1},
        {"model_name": "resnet18", "in_chans": 1},
    ]


def test_weights_given_as_a_file_need_no_network(monkeypatch):
    def refuse(*_):
        raise UserError("asked")

    monkeypatch.setattr(hub, "check_network", refuse)
    hub.check_timm({"model_name": "resnet18", "pretrained": True, "pretrained_cfg_overlay": {"file": "resnet18.pth"}})
    hub.check_timm({"model_name": "resnet18", "pretrained": False})
    hub.check_timm({"model_name": "hf-hub:timm/resnet18.a1_in1k"})
    with pytest.raises(UserError, match="asked"):
        hub.check_timm({"model_name": "resnet18", "pretrained": True})
