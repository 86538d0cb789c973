"""The tokenizer of a folder once all of its files have had their say, and the two files that say it alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

#: The files that say all of it: this package reads them without transformers, and transformers reads the same.
TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
#: Files of older forms, which have their say where they lie beside the others.
SPECIAL_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
#: The model's configuration, which may choose the class, and the folder of templates with names.
MODEL_CONFIG, TEMPLATES = "config.json", "additional_chat_templates"
#: What belongs to a tokenizer beside ``TOKENIZER``, and all that decides with it. Nothing else is read there.
BESIDE = (TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_MAP, ADDED_TOKENS, TEMPLATES)
DECIDING = (*BESIDE, MODEL_CONFIG)
#: What :meth:`FolderTokenizer.files` writes beside ``TOKENIZER``.
WRITTEN = (TOKENIZER_CONFIG, CHAT_TEMPLATE)
#: The class of transformers that takes ``tokenizer.json`` as it is. Version 5 calls it ``TokenizersBackend`` too.
PLAIN_CLASS = "PreTrainedTokenizerFast"
#: How ``data.template`` names those that come with the tokenizer.
AUTO = "auto"
#: The name of the template for conversations with and without tools, and of the one for those with them.
DEFAULT, WITH_TOOLS = "default", "tool_use"


@dataclass(frozen=True)
class FolderTokenizer:
    """``backend`` is the JSON of the `tokenizers` library; ``special`` has the texts of tokens by ``bos_token`` etc.

    ``templates`` are Jinja sources by name, ``default`` among them. ``splits_special``: text never stands for a special
    token. ``cleans_up``: decoding drops the spaces before punctuation (the option clean_up_tokenization_spaces).
    """

    backend: str
    special: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
    splits_special: bool = False
    cleans_up: bool = False

    def to_json(self) -> str:
        """All of it, as :meth:`from_json` reads it."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> FolderTokenizer:
        """The record that :meth:`to_json` has written. Raises :class:`ValueError` for anything else."""
        found = json.loads(text)
        if not isinstance(found, dict) or set(found) != set(cls.__dataclass_fields__):
            raise ValueError("it is no tokenizer of a folder")
        return cls(**found)

    def rendering(self, template: str | None) -> FolderTokenizer:
        """The same tokenizer, whose conversations ``template`` renders, all of them; None leaves it as it is."""
        if template is None or template == self.templates.get(DEFAULT):
            return self
        return replace(self, templates={DEFAULT: template})

    def files(self) -> dict[str, bytes]:
        """The files of a folder from which transformers, and this package without it, read the same tokenizer."""
        config: dict[str, Any] = {
            "tokenizer_class": PLAIN_CLASS,
            **self.special,
            "clean_up_tokenization_spaces": self.cleans_up,
            "split_special_tokens": self.splits_special,
        }
        files = {TOKENIZER: self.backend.encode()}
        if set(self.templates) == {DEFAULT}:
            files[CHAT_TEMPLATE] = self.templates[DEFAULT].encode()
        elif self.templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self.templates.items()]
        if self.cleans_up:  # transformers leaves it undone for BPE unless this says so
            config["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
        files[TOKENIZER_CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        return files


def template_for(templates: Mapping[str, str], *, tools: bool) -> str | None:
    """The one of ``templates`` that renders a conversation, as transformers chooses it; None where none does."""
    named = templates.get(WITH_TOOLS) if tools else None
    return named if named is not None else templates.get(DEFAULT)
