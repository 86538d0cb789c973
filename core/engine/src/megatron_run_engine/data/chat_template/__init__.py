"""Chat templates: conversations as the texts that models know, when they learn from them and when they answer.

Reading order: ``messages`` (what a conversation is), ``template`` (its text, and where in it the responses are),
``renderer`` (Jinja, in a process with limits), ``of_source`` (what a model's data says of it), ``prompt`` (what a model
is given to answer, and where its answer ends).
"""
