"""The contracts: one file per kind, and the data types that they share (actions, topology, activity, schema).

Imports: errors.
"""

from megatron_run.contracts.actions import Action, LayoutSpec, Place, ScheduleSpec
from megatron_run.contracts.data import Dataset, DataSource, Split
from megatron_run.contracts.graph_capture import CaptureSize, GraphCapture, Region
from megatron_run.contracts.model import Boundary, Chunk, ChunkOut, Microbatch, Model, Segment
from megatron_run.contracts.observer import (
    Bar,
    CaptureMetrics,
    CheckpointMetrics,
    EvalMetrics,
    Observer,
    RunSummary,
    StepMetrics,
    StepTrace,
    Timeline,
)
from megatron_run.contracts.optimizer import Optimizer
from megatron_run.contracts.parallel_layer import AttentionShape, LinearPart, ParallelLayers, StackedLayers
from megatron_run.contracts.parameters import Init, ParameterSpec, ParamInfo, Part
from megatron_run.contracts.plugin import KINDS, PluginInfo, entry_point_group
from megatron_run.contracts.scaler import Scaler, scale_notices, scale_text
from megatron_run.contracts.schedule import Schedule
from megatron_run.contracts.state import MASTER, ReadState, StatePiece

__all__ = [
    "KINDS",
    "MASTER",
    "Action",
    "AttentionShape",
    "Bar",
    "Boundary",
    "CaptureMetrics",
    "CaptureSize",
    "CheckpointMetrics",
    "Chunk",
    "ChunkOut",
    "DataSource",
    "Dataset",
    "EvalMetrics",
    "GraphCapture",
    "Init",
    "LayoutSpec",
    "LinearPart",
    "Microbatch",
    "Model",
    "Observer",
    "Optimizer",
    "ParallelLayers",
    "ParamInfo",
    "ParameterSpec",
    "Part",
    "Place",
    "PluginInfo",
    "ReadState",
    "Region",
    "RunSummary",
    "Scaler",
    "Schedule",
    "ScheduleSpec",
    "Segment",
    "Split",
    "StackedLayers",
    "StatePiece",
    "StepMetrics",
    "StepTrace",
    "Timeline",
    "entry_point_group",
    "scale_notices",
    "scale_text",
]
