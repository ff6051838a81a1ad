from powertrain import OptionSpec, RecipeSpec, hookimpl

STEPS = OptionSpec(name="steps", type="int", default=3, help="Requests to send.")


@hookimpl
def powertrain_recipe():
    return RecipeSpec(name="parrot", recipe="powertrain_parrot.recipe:Parrot", options=(STEPS,), api=(1, 0))
