"""A run's private folder: closed to others, short, gone afterwards, and cleaned up after a front that was killed."""

from __future__ import annotations

import os
import subprocess
import sys

from mgtp.runtime.launch import run_folder


def test_folder_is_private_and_short_and_removed(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = run_folder.create_run_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(str(folder / "follower-1000")) < 107
    run_folder.remove_run_folder(folder)
    assert not folder.exists()


def test_folders_of_the_living_stay_and_of_the_dead_go(monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "_base", lambda: tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = run_folder._identity(ended.pid)
    ended.wait()
    for name, owner in (("mgtp-dead", identity), ("mgtp-alive", run_folder._identity(os.getpid()))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").write_text(owner)
    (tmp_path / "mgtp-foreign").mkdir()
    run_folder.remove_stale()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mgtp-alive", "mgtp-foreign"]


def test_a_reused_pid_is_not_taken_for_the_owner(monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "_base", lambda: tmp_path)
    (tmp_path / "mgtp-old").mkdir()
    (tmp_path / "mgtp-old" / "owner").write_text(f"{os.getpid()} 1")
    run_folder.remove_stale()
    assert not list(tmp_path.iterdir())
