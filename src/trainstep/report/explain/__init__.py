"""What a person reads of an explained step: one verdict, then the ranked budget."""
