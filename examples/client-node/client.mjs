// A small client of FairFleet, written from proto/CLIENT.md: the levels basic and compressed.
//
//   node client.mjs --server 127.0.0.1:8440 --name node-1
//   node client.mjs --server fleet.example:8440 --name node-1 --credentials node-1.fleet

import { setImmediate, setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';

import { Session, Stop, status } from './session.mjs';
import { ErrorFeedback, Model, difference, encode } from './streams.mjs';
import { ConstantsTask } from './task.mjs';
import { train } from './training.mjs';
import { NotWanted, UpdateRefused, fetchModel, upload } from './transfers.mjs';

const OUTCOME_COUNTED = 1; // of the enum Outcome
const TURN_MS = 50; // between turns of the event loop during a training, for answers and pings

/** The server said in a heartbeat that the result is not needed. */
class Abandoned extends Error {}

class Client {
  #model = null; // as received
  #held = null; // its digest; null: there is no complete model
  #feedback = new ErrorFeedback();

  constructor({ server, name, credentials }, task) {
    this.task = task;
    const join = {
      client: name,
      codecs: ['int8', 'raw32'],
      device: 'cpu',
      train_samples: task.samples,
      test_samples: task.testSamples,
      software: 'client-node 0.1.0',
    };
    this.session = new Session(server, credentials, join, (joined) => this.#enter(joined));
  }

  /** Begin with a federation: nothing of another one may be used in it. */
  #enter(joined) {
    console.log(`joined ${joined.federation}`);
    this.#model = Model.of(joined.signature);
    this.#held = null;
    this.#feedback.forget();
  }

  /** Take part until the federation is finished, and return why it is. */
  async run() {
    for (;;) {
      const answer = await this.session.call('NextTask');
      if (answer.finished) return answer.finished.reason;
      const task = answer.train ?? answer.evaluate;
      if (!task) {
        await sleep(1000 * (answer.wait?.retry_after_seconds ?? 0));
        continue;
      }
      try {
        await (answer.train ? this.#train(task) : this.#evaluate(task));
      } catch (error) {
        if (error instanceof Stop) throw error;
        console.log(`${task.id}: ${error.message}`);
        const isOver = error instanceof NotWanted || error instanceof Abandoned;
        if (!isOver) await this.#fail(answer.train, task, error);
      }
    }
  }

  /** Tell the server that a task failed. The text must not quote data. */
  async #fail(isTraining, task, error) {
    const failure = error instanceof UpdateRefused ? 'the update was refused' : error.name;
    try {
      if (isTraining) await this.session.call('Heartbeat', { task: task.id, failure });
      else await this.#report(task, { failure });
    } catch (second) {
      if (second instanceof Stop) throw second;
    }
  }

  async #receive(ref) {
    if (this.#held?.equals(ref.digest)) return;
    this.#held = null;
    await fetchModel(this.session, ref, this.#model);
    this.#held = ref.digest;
  }

  async #train(task) {
    this.#checkFeatures(task);
    if (!task.error_feedback) this.#feedback.forget();
    await this.#receive(task.model);
    const trained = this.#model.copy();
    const report = await train(this.task, task.plan, trained.parameters, {
      wantsGradientNorm: task.report_gradient_norm,
      progress: this.#progressOf(task),
    });
    const update = difference(this.#model, trained);
    const { chunks, digest, sizeBytes } = task.error_feedback
      ? this.#feedback.encode(update, task.codec)
      : encode(update, task.codec);
    const announcement = {
      round: task.round,
      model_digest: task.model.digest,
      codec: task.codec,
      size_bytes: sizeBytes,
      digest,
      report,
    };
    let counts = false;
    try {
      const receipt = await upload(this.session, announcement, chunks);
      counts = receipt.outcome === OUTCOME_COUNTED && receipt.digest.equals(digest);
      console.log(`${task.id}: ${report.steps} steps, loss ${report.loss_before.toFixed(4)}`);
    } finally {
      this.#feedback.settle(counts);
    }
  }

  /** Return the function that a training awaits after each step: it sends heartbeats. */
  #progressOf(task) {
    let turn = performance.now();
    let beat = turn;
    return async (done, planned) => {
      const now = performance.now();
      if (now - turn < TURN_MS) return;
      turn = now;
      await setImmediate();
      if (now - beat < 1000 * this.session.joined.heartbeat_seconds) return;
      beat = now;
      const fields = { task: task.id, steps_done: done, steps_planned: planned };
      const answer = await this.session.call('Heartbeat', fields);
      if (answer.abandon) throw new Abandoned(`abandoned: ${answer.reason}`);
    };
  }

  async #evaluate(task) {
    this.#checkFeatures(task);
    await this.#receive(task.model);
    await this.#report(task, { evaluation: this.task.evaluate(this.#model.parameters) });
  }

  async #report(task, fields) {
    try {
      await this.session.call('ReportEvaluation', { version: task.model.version, ...fields });
    } catch (error) {
      if (error.code === status.FAILED_PRECONDITION) throw new NotWanted(error.details);
      throw error;
    }
  }

  #checkFeatures(task) {
    if (task.required_features.length) {
      throw new Error(`this client lacks ${task.required_features.join(', ')}`);
    }
  }
}

const { values: options } = parseArgs({
  options: {
    server: { type: 'string', default: '127.0.0.1:8440' },
    name: { type: 'string', default: 'node' },
    credentials: { type: 'string' },
  },
});
const client = new Client(options, new ConstantsTask());
process.once('SIGINT', async () => {
  await client.session.leave('stopped');
  process.exit(130);
});
try {
  const reason = await client.run();
  console.log(`finished: ${reason}`);
  await client.session.leave('finished');
} catch (error) {
  console.error(`error: ${error.message}`);
  client.session.stub.close();
  process.exitCode = 1;
}
