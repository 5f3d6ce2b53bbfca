"""The pipeline of `rlcli prep`: converts a dataset's rows to parquet files."""
