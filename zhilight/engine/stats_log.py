"""The engine's statistics line in the log."""

from __future__ import annotations

import logging
import time

import msgspec

from zhilight.engine.messages import EngineStats

logger = logging.getLogger(__name__)


class StatsLog:
    """Writes a statistics line every `interval` seconds in which something ran; 0 is silent."""

    def __init__(self, interval: float):
        self._interval = interval
        self._since = time.monotonic()
        self._last = EngineStats()

    def offer(self, stats: EngineStats, now: float) -> None:
        seconds = now - self._since
        if not self._interval or seconds < self._interval:
            return
        last = self._last
        queried = stats.prefix_query_tokens - last.prefix_query_tokens
        hit = (stats.prefix_hit_tokens - last.prefix_hit_tokens) / queried if queried else 0.0
        steps = max(stats.steps - last.steps, 1)
        logger.info(
            "%d running, %d waiting, KV %.1f %%, prefix hits %.1f %%, prompt %.0f tokens/s, output %.0f tokens/s, "
            "%d preemptions, a step: schedule %.2f ms, host %.2f ms, device %.2f ms",
            stats.running, stats.waiting, 100 * stats.kv_usage, 100 * hit,
            (stats.prompt_tokens - last.prompt_tokens) / seconds, (stats.generation_tokens - last.generation_tokens) / seconds,
            stats.preemptions - last.preemptions,
            *(1e3 * (getattr(stats, name) - getattr(last, name)) / steps
              for name in ("schedule_seconds", "host_seconds", "device_seconds")))
        self._since = now
        self._last = msgspec.structs.replace(stats)
