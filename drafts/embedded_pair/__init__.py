"""How the embedded pair was made: corpus -> tokenizer and token files -> target -> distilled drafts -> model cards.

Each step is a module that runs on its own (``python -m hybridspec.drafts.embedded_pair.<step> --help``) and resumes.
"""
