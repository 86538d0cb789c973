"""Chat templates: conversations as the texts that models know, when they learn from them and when they answer.

Reading order: ``messages`` (what a conversation is), ``template`` (its text, and where in it the responses are),
``renderer`` (Jinja, in a process with limits), ``of_source`` (what a model's data says of it), ``prompt`` (what a model
is given to answer, and where its answer ends).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.data.chat_template.chat_messages import Message as Message
    from megatron_run_engine.data.chat_template.chat_messages import NoConversation as NoConversation
    from megatron_run_engine.data.chat_template.chat_messages import checked_messages as checked_messages
    from megatron_run_engine.data.chat_template.chat_messages import checked_tools as checked_tools
    from megatron_run_engine.data.chat_template.chat_messages import kind_of as kind_of
    from megatron_run_engine.data.chat_template.template import Templates as Templates
    from megatron_run_engine.data.chat_template.template import template_source as template_source

__getattr__, __dir__, __all__ = typed_names(__name__)
