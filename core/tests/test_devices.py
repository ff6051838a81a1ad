"""Visible cards are passed on as the parent's own entries (B23)."""

import sys

import pytest

from powertrain import devices
from powertrain.devices import device_variables, require_cards, resolve_device, slot_entries, visible_cards
from powertrain.errors import ConfigError, DeviceError


@pytest.mark.parametrize(
    ("variable", "count", "inference", "training"),
    [
        ("4,5,6,7", None, "4,5", "6,7"),
        ("4,5,6,7", 8, "4,5", "6,7"),
        ("GPU-aa,GPU-bb,GPU-cc,GPU-dd", 8, "GPU-aa,GPU-bb", "GPU-cc,GPU-dd"),
        (None, 4, "0,1", "2,3"),
        (" 3, 1 ,2,0", 4, "3,1", "2,0"),
    ],
)
def test_children_get_the_parents_entries(variable, count, inference, training):
    visible = visible_cards(variable, count)
    require_cards(visible, 4)
    assert slot_entries(visible, range(2)) == inference
    assert slot_entries(visible, range(2, 4)) == training


def test_colocated_parts_get_the_same_entries():
    visible = visible_cards("6,7", 8)
    assert device_variables("cuda", visible, (0, 1)) == device_variables("cuda", visible, (0, 1))
    assert device_variables("cuda", visible, (1,)) == {"CUDA_VISIBLE_DEVICES": "7"}


@pytest.mark.parametrize(("variable", "count", "have"), [("", 4, 0), ("4,5,6", None, 3), (None, 2, 2), ("-1", 4, 0)])
def test_too_few_cards_tells_both_numbers(variable, count, have):
    with pytest.raises(DeviceError, match=f"{have} devices visible, 4 needed"):
        require_cards(visible_cards(variable, count), 4)


@pytest.mark.parametrize(("variable", "entries"), [("0,-1,1", ("0",)), ("2,", ("2",)), ("NoDevFiles", ())])
def test_list_ends_where_the_driver_ends_it(variable, entries):
    assert visible_cards(variable, 4) == entries


def test_card_named_twice_is_refused():
    with pytest.raises(DeviceError, match="names card 4 twice"):
        visible_cards("4,5,4")


def test_card_beyond_the_host_is_refused():
    with pytest.raises(DeviceError, match="names card 4; this host has 4, 0 to 3"):
        visible_cards("3,4", 4)


def test_slot_beyond_the_visible_cards_is_refused():
    with pytest.raises(DeviceError, match="2 devices visible, 4 needed"):
        slot_entries(("4", "5"), (2, 3))


def test_cpu_hides_every_card():
    assert device_variables("cpu", (), range(8)) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("choice", "environ", "cards", "device"),
    [
        ("auto", {}, 2, "cuda"),
        ("auto", {}, 0, "cpu"),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, 2, "cpu"),
        ("auto", {"CUDA_VISIBLE_DEVICES": "1"}, 2, "cuda"),
        ("cpu", {}, 2, "cpu"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-aa"}, 2, "cuda"),
    ],
)
def test_device_is_resolved(monkeypatch, choice, environ, cards, device):
    monkeypatch.setattr(devices, "count_cards", lambda: cards)
    assert resolve_device(choice, environ) == device


@pytest.mark.parametrize(("environ", "cards"), [({}, 0), ({"CUDA_VISIBLE_DEVICES": ""}, 2)])
def test_cuda_without_a_visible_card_is_refused(monkeypatch, environ, cards):
    monkeypatch.setattr(devices, "count_cards", lambda: cards)
    with pytest.raises(DeviceError, match="no card is visible"):
        resolve_device("cuda", environ)


def test_unknown_device_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        resolve_device("cudaa")


def _tool(folder, text):
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\n{text}\n")
    tool.chmod(0o755)
    return str(folder)


def test_cards_are_counted_and_mig_slices_are_not(monkeypatch, tmp_path):
    listing = "GPU 0: H (UUID: GPU-aa)\\n  MIG 1g.10gb Device 0: (UUID: MIG-bb)\\nGPU 1: H (UUID: GPU-cc)"
    monkeypatch.setenv("PATH", _tool(tmp_path, f"print('{listing}')"))
    assert devices.count_cards() == 2


def test_tool_without_a_driver_leaves_it_to_the_drivers_files(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", _tool(tmp_path, "raise SystemExit(9)"))
    folder = tmp_path / "gpus"
    (folder / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "_DRIVER_FOLDER", folder)
    assert devices.count_cards() == 1
