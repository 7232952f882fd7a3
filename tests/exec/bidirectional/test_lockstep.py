"""The comparison of a cache with no cache, in lockstep."""

import pytest
import torch

from herald_exec.bidirectional import make_batch
from herald_exec.bidirectional.kv import VersionedKV
from herald_exec.bidirectional.lockstep import diff_cache, distance_groups, summary
from herald_pipeline.decoding.policy import make_policy
from herald_pipeline.errors import RunError

RESPONSE = 20


def differences(model, prompts, cache, scheduler="dsb-const", **cache_params):
    size = {"s_init": 8} if scheduler.startswith("dsb") else {"block": 8}
    policy = make_policy(
        "confidence",
        scheduler,
        cache,
        decoder_params={"threshold": 0.5},
        scheduler_params=size,
        cache_params=cache_params,
    )
    return diff_cache(model, make_batch(model.shape, prompts, RESPONSE), policy)


def test_no_cache_against_itself_differs_nowhere(model, prompts):
    found = differences(model, prompts, "none")
    assert all(d.max_logit_error == d.max_kv_error == 0 and d.agrees for d in found)


@pytest.mark.parametrize(
    ("scheduler", "cache"), [("fixed", "dual"), ("fixed", "prefix"), ("fixed", "dkv"), ("adablock", "dual")]
)
def test_a_cache_equals_no_cache_right_after_a_refresh_and_not_between(model, prompts, scheduler, cache):
    found = differences(model, prompts, cache, scheduler)
    refreshed = [d for d in found if d.refresh_range is not None]
    assert len(refreshed) > len(prompts)
    assert all(d.max_logit_error == d.max_kv_error == 0 and d.agrees for d in refreshed)
    assert any(d.max_logit_error > 0 for d in found if d.refresh_range is None)


def test_dsb_reports_block_commits_and_refresh_range_of_each_round(llada, prompts):
    found = differences(llada, prompts[:1], "dsb", prefix_window=2)
    first = found[0]
    assert (first.s, first.e, first.U) == (7, 15, 0)
    assert first.refresh_range == (0, 27)
    assert first.committed == found[1].U
    assert sum(d.committed for d in found) == RESPONSE
    assert all(d.forwarded + d.reused == 27 for d in found)
    # Eight commits after the last refresh ask for the next (the refresh's own, but for the first round's, not counted).
    since = 0
    for d in found:
        assert (d.refresh_range is not None) == (d.round == 0 or since >= 8)
        since = 0 if d.refresh_range and d.round else since + d.committed


def test_a_window_heals_what_just_slid_out(llada, prompts):
    # Positions left of s hold the KV of masks until a window computes them again: [-8, 0) is where the error sits.
    bare = summary(differences(llada, prompts, "dual"))["kv_error_by_distance"]["[-8,0)"]
    window = summary(differences(llada, prompts, "dsb", prefix_window=24))["kv_error_by_distance"]["[-8,0)"]
    assert window < 0.5 * bare


def test_a_wrong_entry_with_the_right_version_fails_after_the_refresh(llada, prompts, monkeypatch):
    write, written = VersionedKV.write, []

    def wrong(self, layer, rows, positions, k, v, round_number):
        write(self, layer, rows, positions, k, v, round_number)
        # A full forward into the run's own KV (the exact one is made anew each round) leaves a stale key behind.
        if written and self is written[0] and layer == 1 and len(positions) == 27 and round_number > 0:
            self.keys[layer][0, :, 1] *= 1.001
        written.append(self)

    monkeypatch.setattr(VersionedKV, "write", wrong)
    empty = VersionedKV.empty
    monkeypatch.setattr(VersionedKV, "empty", lambda *args: written.append(empty(*args)) or written[-1])
    message = r"cache 'dsb' differs from no cache right after a full forward: row 0, round [1-9]"
    with pytest.raises(RunError, match=message):
        differences(llada, prompts[:1], "dsb")


def test_distance_groups_are_half_open_and_leave_empty_ones_out():
    distance = torch.tensor([-70, -8, -1, 0, 7, 8])
    value = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert distance_groups(distance, value) == {"(-inf,-64)": 1, "[-8,0)": 3, "[0,8)": 5, "[8,16)": 6}
