"""Configuration: read from its sources, merged, validated; typed and frozen. Imports contracts and errors only."""
