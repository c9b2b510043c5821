"""Runs one offline vLLM engine: ``python -m hybridspec_audit_engine JOB.json``, which writes its answer beside the job.

The job: ``model``, ``arguments`` (as of ``vllm serve``), ``overrides`` (keyword arguments of the engine, which win),
``prompts`` (token ids) or ``texts`` with ``prefix`` and ``prompt_tokens`` to make them from, ``new_tokens``, ``rounds``
(how often the prompts are generated from), ``logprobs`` (how many likeliest tokens to tell), ``answer`` (the file).
"""

import json
import sys
from pathlib import Path
from typing import Any


def engine_options(arguments: list[str], overrides: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own reading of command-line options: those that differ from its defaults, then ``overrides``."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = vars(parser.parse_args(arguments))
    options = {name: value for name, value in given.items() if value != parser.get_default(name)}
    extra = overrides.pop("additional_config", None)
    if extra:
        options["additional_config"] = {**options.get("additional_config", {}), **extra}
    return options | overrides


def make_prompts(tokenizer, job: dict[str, Any], room: int) -> list[list[int]]:
    """Prompts of different lengths that begin alike: half of ``prefix``, then a text each.

    Raises:
        ValueError: the context leaves no room for them.
    """
    size = min(job["prompt_tokens"], room)
    if size < 16:
        raise ValueError(f"the context leaves {size} tokens for a prompt, 16 are needed: raise --max-model-len")
    prefix = tokenizer.encode(job["prefix"])[: size // 2]
    prompts = []
    for number, text in enumerate(job["texts"]):
        own = tokenizer.encode(text, add_special_tokens=False)
        prompts.append([*prefix, *own[: max(4, size - len(prefix) - 5 * number)]])
    return prompts


def run(job: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    options = engine_options(job["arguments"], job["overrides"])
    options |= {"model": job["model"], "disable_log_stats": False}
    llm = LLM.from_engine_args(EngineArgs(**options))
    config = llm.llm_engine.vllm_config
    prompts = job.get("prompts")
    if prompts is None:
        room = config.model_config.max_model_len - job["new_tokens"] - 1
        prompts = make_prompts(llm.get_tokenizer(), job, room)
    wanted = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=job["logprobs"] or None, detokenize=False
    )
    rounds = [
        llm.generate([{"prompt_token_ids": p} for p in prompts], wanted, use_tqdm=False) for _ in range(job["rounds"])
    ]
    tops = [
        [{int(token): entry.logprob for token, entry in position.items()} for position in output.outputs[0].logprobs]
        for output in rounds[0]
        if job["logprobs"]
    ]
    counters = {
        metric.name.removeprefix("vllm:spec_decode_num_"): getattr(metric, "values", None) or metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_")
    }
    speculative = config.speculative_config
    return {
        "version": vllm.__version__,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "hybrid": bool(getattr(config.model_config, "is_hybrid", False)),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "method": getattr(speculative, "method", None),
        "prompts": prompts,
        "rounds": [[list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds],
        "logprobs": tops,
        "counters": counters,
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    answer = run(job)
    Path(job["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
