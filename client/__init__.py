"""The data holder's side: selection, training, the sanitizing gate and the privacy ledger."""
