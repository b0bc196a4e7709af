"""What served answers tell of the drafter: recorded rounds, the error of its confidences, and drift of acceptance."""
