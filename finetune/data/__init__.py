"""Data: files to records, records to text with trained spans, text to rows of tokens, rows to steps."""
