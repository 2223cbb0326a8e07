"""Which blocks of a model matter: the command ``blockskip select`` (the paper's Algorithm 1)."""
