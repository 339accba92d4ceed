"""Why a tensor is wrong: the rules of known mistakes."""
