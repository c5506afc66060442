"""A lock that a killed build left is said: by a process that waits for it, and by `doctor`."""

import os
import threading
import time

import pytest
from torch.utils.file_baton import FileBaton

from ds_sp_overlap.integrations.deepspeed import op_builds
from ds_sp_overlap.tools import doctor
from tests.harness.listening import listening


@pytest.mark.parametrize("patience_s, said", [(0.05, 1), (60, 0)])
def test_a_process_that_waits_for_a_lock_says_so_in_time_and_only_then(tmp_path, monkeypatch, patience_s, said):
    op_builds.install()  # as the import of DeepSpeed does
    monkeypatch.setattr(op_builds, "PATIENCE_S", patience_s)
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    heard = threading.Event()
    with listening() as messages:
        waiting = threading.Thread(target=FileBaton(str(lock)).wait, daemon=True)  # torch's own, as DeepSpeed calls it
        waiting.start()
        while said and not messages:
            heard.wait(0.02)
        lock.unlink()
        waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert [
        message
        for message in messages
        if f"{lock} (made 0 min ago): another rank or process compiles deepspeed_shm_comm" in message
    ] == messages
    assert len(messages) == said


@pytest.mark.parametrize("folder", ["deepspeed_shm_comm", "py311_cpu/deepspeed_shm_comm"])
def test_doctor_names_a_lock_and_what_to_do(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / folder).mkdir(parents=True)
    assert "no lock" in doctor.versions()
    (tmp_path / folder / "lock").touch()
    lock = tmp_path / folder / "lock"
    assert f"{lock} (made 0 min ago): another rank or process compiles" in doctor.versions()
    made = time.time() - 700
    os.utime(lock, (made, made))
    assert f"{lock} (made 12 min ago): another rank or process compiles" in doctor.versions()
