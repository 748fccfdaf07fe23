// Local training as proto/CLIENT.md describes it: batches, steps and losses.
//
// A task has `samples`, `gradient(parameters, indices)` and `loss(parameters, indices)`. Both are
// means over the samples with these indices.

const SOLVER_ADAM = 2; // of the enums in fleet.proto
const LOSS_EXACT = 1;
const LOSS_NONE = 4;

/** Return a function of random numbers in [0, 1) for a 64-bit seed (splitmix64). */
export function generator(seed) {
  let state = BigInt(seed);
  return () => {
    state = BigInt.asUintN(64, state + 0x9e3779b97f4a7c15n);
    let z = state;
    z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    return Number((z ^ (z >> 31n)) >> 11n) / 2 ** 53;
  };
}

/** Return how many batches an epoch has; a single last sample joins the batch before it. */
export function batchesInEpoch(samples, batchSize) {
  const size = Math.min(batchSize || samples, samples);
  return Math.floor(samples / size) + (samples % size > 1 ? 1 : 0);
}

export function plannedSteps(plan, samples) {
  return plan.steps || plan.epochs * batchesInEpoch(samples, plan.batch_size);
}

/** Yield the indices of the samples of each step. */
export function* batches(plan, samples) {
  const size = Math.min(plan.batch_size || samples, samples);
  const count = batchesInEpoch(samples, plan.batch_size);
  const random = generator(plan.seed);
  let left = plannedSteps(plan, samples);
  while (left > 0) {
    const order = Array.from({ length: samples }, (_, i) => i);
    for (let i = samples - 1; i > 0; i--) {
      const other = Math.floor(random() * (i + 1));
      [order[i], order[other]] = [order[other], order[i]];
    }
    for (let batch = 0; batch < count && left > 0; batch++, left--) {
      const isLast = batch === count - 1;
      yield order.slice(batch * size, isLast ? samples : (batch + 1) * size);
    }
  }
}

/** The plan's solver on one vector of parameters, which it changes in place. */
export class Solver {
  #steps = 0;

  constructor(plan, parameters) {
    this.plan = plan;
    this.parameters = parameters;
    this.received = plan.proximal_mu > 0 ? parameters.slice() : null;
    const isAdam = plan.solver === SOLVER_ADAM;
    this.mean = isAdam || plan.momentum > 0 ? new Float32Array(parameters.length) : null;
    this.square = isAdam ? new Float32Array(parameters.length) : null;
  }

  step(gradient) {
    this.#steps += 1;
    const { plan, parameters, received } = this;
    for (let i = 0; i < parameters.length; i++) {
      let g = gradient[i];
      if (received) g += plan.proximal_mu * (parameters[i] - received[i]);
      g += plan.weight_decay * parameters[i];
      parameters[i] -= plan.learning_rate * this.#direction(g, i);
    }
  }

  #direction(g, i) {
    const { plan, mean, square } = this;
    if (square) {
      mean[i] = 0.9 * mean[i] + 0.1 * g;
      square[i] = 0.999 * square[i] + 0.001 * g * g;
      const a = mean[i] / (1 - 0.9 ** this.#steps);
      const b = square[i] / (1 - 0.999 ** this.#steps);
      return a / (Math.sqrt(b) + 1e-8);
    }
    if (!mean) return g;
    mean[i] = plan.momentum * mean[i] + g;
    return plan.nesterov ? g + plan.momentum * mean[i] : mean[i];
  }
}

/**
 * Train parameters in place as the plan says, and return the TrainReport. `progress` is awaited
 * after each step; it may throw, to end the training.
 */
export async function train(task, plan, parameters, { wantsGradientNorm, progress }) {
  const all = Array.from({ length: task.samples }, (_, i) => i);
  const report = { samples: task.samples, learning_rate: plan.learning_rate };
  report.loss_before = task.loss(parameters, all); // exact, which every plan allows
  report.loss_measurement = LOSS_EXACT;
  if (wantsGradientNorm) report.gradient_norm = norm(task.gradient(parameters, all));
  const planned = plannedSteps(plan, task.samples);
  const solver = new Solver(plan, parameters);
  const began = performance.now();
  let done = 0;
  for (const indices of batches(plan, task.samples)) {
    solver.step(task.gradient(parameters, indices));
    done += 1;
    await progress(done, planned);
  }
  report.seconds = (performance.now() - began) / 1000;
  report.steps = report.planned_steps = done;
  report.batch_size = Math.min(plan.batch_size || task.samples, task.samples);
  if (plan.loss_after !== LOSS_NONE) report.loss_after = task.loss(parameters, all);
  return report;
}

function norm(values) {
  return Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));
}
