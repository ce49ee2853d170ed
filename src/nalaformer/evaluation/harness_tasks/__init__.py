"""lm-eval's task files for local .jsonl files; `lm_eval --include_path` takes this folder too, run where the data is."""
