"""The statistics line: rates of the interval, and silence when it is off."""

from __future__ import annotations

import logging

from zhilight.engine.messages import EngineStats
from zhilight.engine.stats_log import StatsLog


def test_a_line_tells_the_rates_since_the_last_one(caplog):
    caplog.set_level(logging.INFO, "zhilight.engine.stats_log")
    log = StatsLog(10.0)
    start = log._since
    stats = EngineStats(running=3, waiting=1, kv_usage=0.25, generation_tokens=500, prompt_tokens=1000,
                        prefix_query_tokens=1000, prefix_hit_tokens=250, steps=100, device_seconds=1.5)
    log.offer(stats, start + 9)
    assert not caplog.records
    log.offer(stats, start + 10)
    (line,) = (record.getMessage() for record in caplog.records)
    for part in ("3 running, 1 waiting", "KV 25.0 %", "hits 25.0 %", "prompt 100 tokens/s", "output 50 tokens/s",
                 "device 15.00 ms"):
        assert part in line
    stats.generation_tokens = 700
    log.offer(stats, start + 30)
    assert "output 10 tokens/s" in caplog.records[-1].getMessage()


def test_an_interval_of_zero_is_silent(caplog):
    caplog.set_level(logging.INFO, "zhilight.engine.stats_log")
    log = StatsLog(0.0)
    log.offer(EngineStats(steps=5), log._since + 1000)
    assert not caplog.records
