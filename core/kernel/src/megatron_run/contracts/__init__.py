"""The contracts: one file per kind, and the data types that they share (parameters, topology, activity, schema).

Imports: errors.
"""

from megatron_run.contracts.data import Dataset, DataSource, Field, Judge, Recipe, Split
from megatron_run.contracts.format import (
    AdapterWeights,
    ForeignAdapters,
    Format,
    ReadTensor,
    TranslatedScript,
    Weights,
)
from megatron_run.contracts.graph_capture import CaptureSize, GraphCapture, Region
from megatron_run.contracts.model import (
    Boundary,
    Chunk,
    ChunkOut,
    Decoding,
    Microbatch,
    Mixture,
    Model,
    ModelOptions,
    NewParts,
    Segment,
    mixture_of,
)
from megatron_run.contracts.observer import (
    Bar,
    CaptureMetrics,
    CheckpointMetrics,
    DevicePeak,
    EvalMetrics,
    Observer,
    RunSummary,
    StepMetrics,
    StepTrace,
    Timeline,
)
from megatron_run.contracts.optimizer import MASTER, Optimizer, ReadState, StatePiece
from megatron_run.contracts.parallel_layer import (
    Adapters,
    AttentionShape,
    LinearPart,
    NormKind,
    ParallelLayers,
    StackedLayers,
)
from megatron_run.contracts.parameters import Init, ParameterSpec, ParamInfo, Part
from megatron_run.contracts.plugin import KINDS, RUN_KINDS, PluginInfo, entry_point_group
from megatron_run.contracts.scaler import Scaler, scale_notices, scale_text
from megatron_run.contracts.schedule import Action, LayoutSpec, Place, Schedule, ScheduleSpec

__all__ = [
    "KINDS",
    "MASTER",
    "RUN_KINDS",
    "Action",
    "AdapterWeights",
    "Adapters",
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
    "Decoding",
    "DevicePeak",
    "EvalMetrics",
    "Field",
    "ForeignAdapters",
    "Format",
    "GraphCapture",
    "Init",
    "Judge",
    "LayoutSpec",
    "LinearPart",
    "Microbatch",
    "Mixture",
    "Model",
    "ModelOptions",
    "NewParts",
    "NormKind",
    "Observer",
    "Optimizer",
    "ParallelLayers",
    "ParamInfo",
    "ParameterSpec",
    "Part",
    "Place",
    "PluginInfo",
    "ReadState",
    "ReadTensor",
    "Recipe",
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
    "TranslatedScript",
    "Weights",
    "entry_point_group",
    "mixture_of",
    "scale_notices",
    "scale_text",
]
