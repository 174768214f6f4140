/* Search in pages that are opened from the disk. Browsers start no worker for a file:// page, so the
   search worker runs in a hidden frame, which has globals of its own as a worker has. Pages from a
   server keep the browser's own workers. Only what the theme's search worker uses is provided. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const scope = this.#frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      scope.importScripts = async (...urls) => {
        for (const each of urls) await this.#load(each);
      };
      this.#loaded = this.#load(url);
    }

    async postMessage(data) {
      await this.#loaded;
      this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }

    #load(url) {
      const script = this.#frame.contentDocument.createElement("script");
      script.src = new URL(url, location.href).href;
      this.#frame.contentDocument.body.append(script);
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
      });
    }
  };
}
