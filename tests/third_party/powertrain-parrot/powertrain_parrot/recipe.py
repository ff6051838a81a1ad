"""A recipe that asks an inference engine and notes what it says."""

import powertrain as pt
from powertrain.errors import ConfigError


class Parrot(pt.Recipe):
    def check(self, context):
        if len(context.config.layout.parts) != 1:
            message = "recipe parrot takes one inference part"
            raise ConfigError(message)

    async def run(self, context):
        (pool,) = context.driver.infer.values()
        for step in range(1, self.options["steps"] + 1):
            request = pt.GenerateRequest(
                request_id=f"ask-{step}", prompt=[step], sampling=pt.SamplingParams(max_tokens=8)
            )
            (said,) = (await pool.generate(request)).completions
            version = {segment.version for segment in said.segments}
            context.folder.log(step, {"said": said.tokens.tolist(), "versions": sorted(version)})
