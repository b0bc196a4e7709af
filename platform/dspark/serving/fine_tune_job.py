"""Submits a job to Ray's job API."""

import shlex

from dspark.traffic.fine_tune import AlreadySubmitted, Submit

EXISTS = "already exists"  # as Ray says it of an id


def submit_job(address: str | None, working_dir: str | None) -> Submit:
    """address: None finds the cluster's own dashboard when a job is submitted."""

    def submit(command: list[str], job_id: str) -> None:
        from ray.job_submission import JobSubmissionClient  # needed once a day at most

        client = JobSubmissionClient(address)
        runtime_env = {} if working_dir is None else {"working_dir": working_dir}
        try:
            client.submit_job(entrypoint=shlex.join(command), submission_id=job_id, runtime_env=runtime_env)
        except RuntimeError as error:
            if EXISTS in str(error):
                raise AlreadySubmitted(job_id) from None
            raise

    return submit
