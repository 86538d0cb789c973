"""From texts to indexed datasets, and what can be seen of them: prepare, inspect, convert.

``inputs`` finds files and cuts them into blocks; ``records`` reads the documents of a block; ``parts`` keeps the tokens
of a block; ``workers`` runs many blocks at once; ``prepare`` puts these together and can be killed at any moment.
``about`` reads what it leaves beside a dataset.
"""
