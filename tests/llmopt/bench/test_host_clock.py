"""The clock of the host's share of a step."""

from __future__ import annotations

import pytest

from llmopt.bench.host_clock import HostClock
from llmopt.bench.reuse import Setting, _request, measure
from llmopt.testing import tiny_model


@pytest.fixture
def setting() -> Setting:
    return Setting(tiny_model(max_position_embeddings=512), {}, seconds=0.01, quick=True)


def test_the_clock_leaves_the_pipeline_as_it_was(setting: Setting) -> None:
    with setting.build(max_model_len=256) as pipe:
        before = pipe.execute, pipe.propose
        clock = HostClock(pipe)
        pipe.run([_request(pipe, [5, 6, 7], 9)])
        host_s, step_s = clock.close()
        assert 0 < host_s < step_s < 1
        assert (pipe.execute, pipe.propose) == before
        assert "step" not in vars(pipe)


def test_256_requests_decode_at_once_and_the_share_of_the_host_is_shown(setting: Setting) -> None:
    result = measure("host256", setting)
    assert [name for name, _ in result.rows] == ["llmopt", "+ paged_kv, prefix_cache"]
    assert all(0 < float(row["host %"]) < 100 for _, row in result.rows)
    setting.close()
