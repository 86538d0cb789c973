"""The data pipeline from documents to batches: tokenizers, packing, sample order, fields on the device.

Imports: contracts, errors, files, lazy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.data.documents import Document as Document
    from megatron_run_engine.data.documents import Shares as Shares
    from megatron_run_engine.data.documents import find_documents as find_documents
    from megatron_run_engine.data.documents import require_within as require_within
    from megatron_run_engine.data.option_types import AT_COMMAS as AT_COMMAS
    from megatron_run_engine.data.option_types import SPLITS as SPLITS
    from megatron_run_engine.data.option_types import Paths as Paths
    from megatron_run_engine.data.option_types import SplitShares as SplitShares
    from megatron_run_engine.data.option_types import check_split as check_split
    from megatron_run_engine.data.overlap import NGRAM_WORDS as NGRAM_WORDS
    from megatron_run_engine.data.overlap import ngrams as ngrams
    from megatron_run_engine.data.packing import PACKED_FIELDS as PACKED_FIELDS
    from megatron_run_engine.data.packing import PackedDocuments as PackedDocuments
    from megatron_run_engine.data.packing import best_fit as best_fit
    from megatron_run_engine.data.packing import one_a_row as one_a_row
    from megatron_run_engine.data.packing import same_shape as same_shape
    from megatron_run_engine.data.pair_layout import PairLayout as PairLayout
    from megatron_run_engine.data.prepared_texts import DrawnSamples as DrawnSamples
    from megatron_run_engine.data.prepared_texts import PreparedTextOptions as PreparedTextOptions
    from megatron_run_engine.data.prepared_texts import PreparedTexts as PreparedTexts
    from megatron_run_engine.data.standalone_tokenizer import json_file as json_file
    from megatron_run_engine.data.token_ids import check_ids as check_ids
    from megatron_run_engine.data.token_ids import require_ids as require_ids
    from megatron_run_engine.data.tokenized_source import TokenizedSource as TokenizedSource
    from megatron_run_engine.data.tokenizer import files_of_tokenizer as files_of_tokenizer
    from megatron_run_engine.data.tokenizer import open_tokenizer as open_tokenizer
    from megatron_run_engine.data.tokenizer_base import Tokenizer as Tokenizer
    from megatron_run_engine.data.tokenizer_files import TOKENIZER_FILES as TOKENIZER_FILES
    from megatron_run_engine.data.tokenizer_files import holds_tokenizer as holds_tokenizer
    from megatron_run_engine.data.tokenizer_folder.folder_files import is_tokenizer_file as is_tokenizer_file
    from megatron_run_engine.data.tokenizer_folder.record import AUTO as AUTO
    from megatron_run_engine.data.tokenizer_training import train_tokenizer as train_tokenizer

__getattr__, __dir__, __all__ = typed_names(__name__)
