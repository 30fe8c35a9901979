"""Generation workers, their driver side and sampling."""
