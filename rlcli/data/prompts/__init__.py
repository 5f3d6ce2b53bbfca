"""Prompts: parquet files, tokenisation, the chat template, mixtures and the cursor."""
