"""Studies: runs that answer a question about methods, from training to table. Each is one file or folder with one command."""
