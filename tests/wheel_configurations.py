"""Resolves what `VllmEngine` passes with the vLLM that is imported, for every kind of run: a program of
tests/integration/test_vllm_wheels.py, whose processes have `wheel_stubs` in PYTHONPATH.

usage: wheel_configurations.py DENSE MIXTURE VISION: folders of models. Prints kind → what vLLM makes of it, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rlcli.errors import RlcliError
from rlcli.rollout.engine import EngineSpec
from rlcli.rollout.vllm.vllm_arguments import engine_arguments, environment_variables

DENSE, MIXTURE, VISION = sys.argv[1:]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "awake": {"sleep": "none"},
    "float32": {"dtype": "float32"},
    "float head": {"float_head": True},
    "exact steps": {"exact_steps": True},
    "a cache of a given size": {"kv_cache_bytes": 1 << 30},
    "fp8": {"quantization": "fp8"},
    "tensor parallel": {"tensor_parallel": 2},
    "adapter": {"lora_rank": 16, "weights_follow": False},
    "drafts": {"speculate": 4},
    "experts": {"model": MIXTURE},
    "experts in fp8": {"model": MIXTURE, "quantization": "fp8", "enforce_eager": True},
    "routes": {"model": MIXTURE, "routes": True},
    "adapter on experts": {
        "model": MIXTURE,
        "lora_rank": 16,
        "weights_follow": False,
        "lora_targets": "all-linear,experts",
        "lora_experts": True,
    },
    "vision": {"model": VISION, "image_rule": object(), "max_images": 2},
}


def spec(**changes: Any) -> EngineSpec:
    plain: dict[str, Any] = {
        "model": DENSE,
        "dtype": "bfloat16",
        "device": "cuda",
        "max_length": 512,
        "max_concurrent": 256,
        "tensor_parallel": 1,
        "lora_rank": 0,
        "weights_follow": True,
        "kv_cache_bytes": None,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "stop_token_ids": (),
        "group_id": "test",
    }
    return EngineSpec(**(plain | changes))


def resolved(spec: EngineSpec) -> dict[str, Any]:
    from vllm.config.vllm import enable_allreduce_rms_fusion
    from vllm.engine.arg_utils import EngineArgs

    initial = dict(os.environ)
    os.environ |= environment_variables(spec) | {"WORLD_SIZE": str(spec.tensor_parallel)}
    try:
        config = EngineArgs(**engine_arguments(spec)).create_engine_config()
        return {
            "second runner": config.use_v2_model_runner,
            "fused all-reduce": config.compilation_config.pass_config.fuse_allreduce_rms,
            "fused by default": enable_allreduce_rms_fusion(config),
            "experts": config.kernel_config.moe_backend,
            "async": config.scheduler_config.async_scheduling,
            "graphs": len(config.compilation_config.cudagraph_capture_sizes or []),
            "sleeps": config.model_config.enable_sleep_mode,
            "tokens": config.scheduler_config.max_num_batched_tokens,
            "quantization": config.model_config.quantization,
            "routes": getattr(config, "aux_output_config", config.model_config).enable_return_routed_experts,
            "head": str(config.model_config.head_dtype),
            "drafts": config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        }
    except RlcliError as error:
        return {"refused": error.message}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        os.environ.clear()
        os.environ.update(initial)


def main() -> None:
    import vllm
    import vllm.config.vllm
    import vllm.utils.flashinfer
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
    from vllm.platforms import current_platform

    CudaRTLibrary.__init__ = lambda self, *args: None  # type: ignore[method-assign]
    vllm.config.vllm.HAS_TRITON = True  # which is a part of torch for CUDA
    vllm.utils.flashinfer.has_flashinfer = lambda: True
    configurations: dict[str, Any] = {"version": vllm.__version__, "platform": type(current_platform).__name__}
    configurations |= {kind: resolved(spec(**changes)) for kind, changes in KINDS.items()}
    sys.stdout.write("\n" + json.dumps(configurations))


if __name__ == "__main__":
    main()
