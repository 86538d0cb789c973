"""The contracts: one file per kind. What a plugin must do, in the docstrings; nothing here imports torch."""

from megatron_run.contracts.data import Dataset, DataSource, Split
from megatron_run.contracts.graph_capture import CaptureSize, GraphCapture, Region
from megatron_run.contracts.model import Boundary, Chunk, ChunkOut, Microbatch, Model, Segment
from megatron_run.contracts.observer import (
    CaptureMetrics,
    CheckpointMetrics,
    DevicePeak,
    EvalMetrics,
    Observer,
    RunSummary,
    StepMetrics,
    StepTrace,
)
from megatron_run.contracts.optimizer import Optimizer
from megatron_run.contracts.parallel_layer import AttentionShape, LinearPart, ParallelLayers, StackedLayers
from megatron_run.contracts.parameters import Init, ParameterSpec, ParamInfo, Part
from megatron_run.contracts.plugin import KINDS, PluginInfo, entry_point_group
from megatron_run.contracts.scaler import Scaler, scale_notices, scale_text
from megatron_run.contracts.schedule import Schedule
from megatron_run.contracts.state import MASTER, ReadState, StatePiece
from megatron_run_engine.runtime.context import BuildContext, Dtypes

__all__ = [
    "KINDS",
    "MASTER",
    "AttentionShape",
    "Boundary",
    "BuildContext",
    "CaptureMetrics",
    "CaptureSize",
    "CheckpointMetrics",
    "Chunk",
    "ChunkOut",
    "DataSource",
    "Dataset",
    "DevicePeak",
    "Dtypes",
    "EvalMetrics",
    "GraphCapture",
    "Init",
    "LinearPart",
    "Microbatch",
    "Model",
    "Observer",
    "Optimizer",
    "ParallelLayers",
    "ParamInfo",
    "ParameterSpec",
    "Part",
    "PluginInfo",
    "ReadState",
    "Region",
    "RunSummary",
    "Scaler",
    "Schedule",
    "Segment",
    "Split",
    "StackedLayers",
    "StatePiece",
    "StepMetrics",
    "StepTrace",
    "entry_point_group",
    "scale_notices",
    "scale_text",
]
