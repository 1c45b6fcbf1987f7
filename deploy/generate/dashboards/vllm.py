"""What users of vLLM notice, and what the connector does for it."""

from __future__ import annotations

from ..panels import Dashboard, Look, Panel, Query, Row, Unit
from .queries import AT, ENGINE, LOOKUP, MODEL, OF, SERVER, each, quantiles, rate

VLLM = Dashboard(
    name="vllm",
    title="kvtier: vLLM beside it",
    about="What users of vLLM notice, and what the connector does for it.",
    variables=[ENGINE, MODEL, SERVER],
    rows=[
        Row(
            "What do users notice?",
            [
                Panel(
                    "Time to first token",
                    "What a cache is for.",
                    quantiles("vllm:time_to_first_token_seconds", at=OF),
                    Unit.SECONDS,
                ),
                Panel(
                    "Time between tokens",
                    "Loads and stores go on beside the model and should not be seen here.",
                    quantiles("vllm:inter_token_latency_seconds", at=OF),
                    Unit.SECONDS,
                ),
                Panel(
                    "Time of a request",
                    "From its arrival to its last token.",
                    quantiles("vllm:e2e_request_latency_seconds", at=OF),
                    Unit.SECONDS,
                ),
            ],
        ),
        Row(
            "Where do prompts come from?",
            [
                Panel(
                    "Prompt tokens",
                    "external_kv_transfer is kvtier, and local_cache_hit the engine's own cache.",
                    [
                        Query(
                            each("source", rate("vllm:prompt_tokens_by_source_total", at=OF)),
                            "{{source}}",
                        )
                    ],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
                Panel(
                    "Cached prompt tokens by tier",
                    "As vLLM names tiers: device is its own cache.",
                    [
                        Query(
                            each(
                                "source", rate("vllm:prompt_tokens_cached_by_source_total", at=OF)
                            ),
                            "{{source}}",
                        )
                    ],
                    Unit.A_SECOND,
                    Look.AREAS,
                ),
                Panel(
                    "Hit ratios",
                    "Of vLLM's own cache, of kvtier for what that did not hold, and of all "
                    "tiers as the servers see it.",
                    [
                        Query(
                            f"sum({rate('vllm:prefix_cache_hits_total', at=OF)}) / "
                            f"(sum({rate('vllm:prefix_cache_queries_total', at=OF)}) > 0)",
                            "vLLM's own",
                        ),
                        Query(
                            f"sum({rate('vllm:external_prefix_cache_hits_total', at=OF)}) / "
                            f"(sum({rate('vllm:external_prefix_cache_queries_total', at=OF)}) > 0)",
                            "kvtier",
                        ),
                        Query(f"avg(kvtier:token_hit_ratio:rate5m{{{AT}}})", "all tiers"),
                    ],
                    Unit.RATIO,
                ),
            ],
        ),
        Row(
            "How busy are the engines?",
            [
                Panel(
                    "Requests",
                    "deferred are those that wait for a transfer, also of kvtier.",
                    [
                        Query(f"sum(vllm:num_requests_running{{{OF}}})", "running"),
                        Query(
                            each("reason", f"vllm:num_requests_waiting_by_reason{{{OF}}}"),
                            "waiting, {{reason}}",
                        ),
                    ],
                    look=Look.AREAS,
                ),
                Panel(
                    "KV cache in use",
                    "Of each engine's own cache (L0).",
                    [
                        Query(
                            each("instance, engine", f"vllm:kv_cache_usage_perc{{{OF}}}"),
                            "{{instance}} {{engine}}",
                        )
                    ],
                    Unit.RATIO,
                ),
                Panel(
                    "Tokens",
                    "Prompt tokens, and answers'.",
                    [
                        Query(f"sum({rate('vllm:prompt_tokens_total', at=OF)})", "prompts"),
                        Query(f"sum({rate('vllm:generation_tokens_total', at=OF)})", "answers"),
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Finished requests",
                    "error is what vLLM could not serve.",
                    [
                        Query(
                            each("finished_reason", rate("vllm:request_success_total", at=OF)),
                            "{{finished_reason}}",
                        ),
                        Query(f"sum({rate('vllm:num_preemptions_total', at=OF)})", "preemptions"),
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Waiting for a place",
                    "From a request's arrival until it first runs; loads of kvtier are in it.",
                    quantiles("vllm:request_queue_time_seconds", at=OF),
                    Unit.SECONDS,
                ),
                Panel(
                    "Computing prompts",
                    "From there to the first token.",
                    quantiles("vllm:request_prefill_time_seconds", at=OF),
                    Unit.SECONDS,
                ),
            ],
        ),
        Row(
            "What does the connector do?",
            [
                Panel(
                    "Blocks",
                    "Copied between the engines' KV caches and the servers' slots, and those that "
                    "could not be.",
                    [
                        Query(f"sum({rate(f'kvtier_engine_{name}_total', at=OF)})", legend)
                        for name, legend in {
                            "loaded_blocks": "loaded",
                            "stored_blocks": "stored",
                            "load_failed_blocks": "load failed",
                            "store_failed_blocks": "store failed",
                            "corrupt_blocks": "corrupt",
                        }.items()
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Bytes",
                    "Of these blocks, on all ranks.",
                    [
                        Query(f"sum({rate('kvtier_engine_loaded_bytes_total', at=OF)})", "loaded"),
                        Query(f"sum({rate('kvtier_engine_stored_bytes_total', at=OF)})", "stored"),
                    ],
                    Unit.BYTES_A_SECOND,
                ),
                Panel(
                    "Time for copies",
                    "Copies that are under way, on average.",
                    [
                        Query(f"sum({rate('kvtier_engine_load_seconds_total', at=OF)})", "loads"),
                        Query(f"sum({rate('kvtier_engine_store_seconds_total', at=OF)})", "stores"),
                    ],
                ),
                Panel(
                    "Calls that failed",
                    "Each is a miss. absent: there is no server. deadline: it was too slow. Bad "
                    "readings of the connector are no calls.",
                    [
                        Query(
                            each("reason", rate("kvtier_engine_misses_total", at=OF)), "{{reason}}"
                        ),
                        Query(
                            f"sum({rate('kvtier_engine_bad_deltas_total', at=OF)})", "bad readings"
                        ),
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Requests that go past the cache",
                    "controls: what they asked for is unknown, and their answer says so.",
                    [
                        Query(
                            each("reason", rate("kvtier_engine_bypassed_requests_total", at=OF)),
                            "{{reason}}",
                        )
                    ],
                    Unit.A_SECOND,
                ),
                Panel(
                    "Time for a lookup",
                    "At the servers, without the socket.",
                    quantiles("kvtier_frame_seconds", LOOKUP),
                    Unit.SECONDS,
                ),
            ],
        ),
    ],
)
