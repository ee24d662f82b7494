"""The demo model: its weights and tokenizer, and the generators of the tasks that it was trained on.

``strandline eval`` draws its held-out tasks here and ``strandline demo`` its documents, so the generators are part of
the installed package. The code that only training needs is in ``tools/``.
"""
